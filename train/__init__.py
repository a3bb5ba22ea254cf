"""Documents to a pre-trained encoder, and an encoder to a fine-tuned task: the stages that need torch."""
