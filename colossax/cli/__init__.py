"""The command line: `colossax VERB`. A verb's module is imported when the verb is used."""

from .main import main as main
