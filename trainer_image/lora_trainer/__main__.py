"""`python -m lora_trainer`: signals first, then everything else."""

from lora_trainer.stopping import STOP, follow_launcher

if __name__ == "__main__":
    STOP.install()
    follow_launcher()
    from lora_trainer.cli import app

    app()
