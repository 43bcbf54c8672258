"""Keras networks: keras.applications, and models of users."""
