"""What a step is given, looked at before it is traced; what fails within, explained."""
