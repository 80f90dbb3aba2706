"""What the words of a command line say: plain options, dotted values, and what they ask for."""
