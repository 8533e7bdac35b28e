"""Files that a run writes (`run_folder`), and the curves of experiment trackers."""
