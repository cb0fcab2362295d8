"""Developer tools that are not part of the product: tools/demo_model trains the demo model."""
