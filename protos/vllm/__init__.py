"""Services under names that others have given them."""
