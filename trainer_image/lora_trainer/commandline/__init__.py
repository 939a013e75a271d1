"""`lora-trainer train` and `train_lora.py`: training from the command line, without manifest and operator. No torch here."""
