"""Programs beside the package: `python scripts/NAME.py --help`."""
