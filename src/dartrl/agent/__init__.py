"""Pure text and geometry: typed actions from model text, messages from history, one file per dialect."""
