"""Pictures, sounds and videos in prompts: items, and the interfaces of what makes them ready and encodes them."""
