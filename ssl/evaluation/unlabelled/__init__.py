"""What features say of a network without any label."""
