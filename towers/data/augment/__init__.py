"""Augmentation of images, in training and in evaluations."""
