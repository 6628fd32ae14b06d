"""How a group forms, gathers objects, learns of losses, and ends."""
