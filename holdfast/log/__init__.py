"""The tensor log: records of what stages send each other, in memory and spilled to disk."""
