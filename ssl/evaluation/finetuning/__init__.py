"""Fine-tuning: backbone and a linear classifier trained together on labelled images."""
