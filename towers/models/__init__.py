"""Single-device networks of Keras: architectures, layers, and networks of users."""
