"""Networks of Keras: its applications, and those of users."""
