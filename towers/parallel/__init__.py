"""The loop over the towers, the step, the strategies and the trainers."""
