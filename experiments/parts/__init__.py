"""Parts of one experiment that would make its file too long; the name says of which."""
