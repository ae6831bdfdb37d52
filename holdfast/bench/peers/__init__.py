"""What `holdfast bench` races against; each module is a program of its own."""
