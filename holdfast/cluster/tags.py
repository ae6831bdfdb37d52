"""The tags of messages between workers, all in one place: two kinds under way at once must not share one.

That holds for workers that disagree, too. A message of another size than was expected breaks the generation, and a
large one without room for it is never sent. With tags of their own, two workers that do different things wait, and the
coordinator, which is told what each of them does, finds out.

Messages of one tag from one worker to another arrive in the order in which they were sent. Tags below ``BUCKETS`` are
for single kinds; above it ranges begin, each with room for all that will ever come.
"""

SUM = 0  # votes, and other sums of a few numbers
LENGTH, TEXT, TENSOR = 1, 2, 3  # a nested value: how long its description is, the description, its tensors
MODEL = 4  # parts of a model that one worker writes as one file
AVERAGE = 5  # values on their way to the replica that averages them
MEAN = 6  # means on their way back
BALLOT = 7  # numbers on which a policy of synchronisation decides
UPDATE = 8  # updates that SSP pushes
WATCH = 9  # the last message of a process in a user's own loop: it gives up, or is done
DISTANCE = 10  # marks and distances of a user's own loop
TIE = 11  # gradients of a weight that several layers share
ECHO, ECHO_ORDER = 12, 13  # round trips that measure a link
STATISTICS = 14  # what modules have measured in forward passes
AGREE = 15  # whether all workers ask for the same, before they exchange its result
MEET = 16  # whether replicas that train apart are at the same point and send the same tensors
GATHER = 17  # the first message of a generation: a member is here
BUCKETS = 32  # gradients: ``BUCKET_TAGS`` for each bucket
BUCKET_TAGS = 64  # one for each root of the tree that a worker sends, the last for the sum
PIPE_TAGS = 2**28  # of one direction of a pipe: one for headers, and one for each description
FORWARD, BACKWARD, REPLAY = 2 * PIPE_TAGS, 3 * PIPE_TAGS, 4 * PIPE_TAGS  # between stages; records of a log
