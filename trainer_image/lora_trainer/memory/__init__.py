"""Where the weights of the base model are kept, in what format, and how much memory all of it takes."""
