"""How a backbone does on images of other sizes than it was trained on."""
