"""Reports of an ensemble as text, figures and HTML. Start at `report`."""
