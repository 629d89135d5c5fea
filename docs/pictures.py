"""Draws the pictures of the collectives: python docs/pictures.py (needs matplotlib).

The sparse exchanges begin with the same four vectors; the numbers that follow are computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from curves import auto, volume
from drawing import EDGES, FILLS, GREY, ROW, Message, Picture, Vector, save

SIZE, K, RANKS = 12, 4, 4
SELECTED: tuple[Vector, ...] = (
    {0: 2, 3: 5, 5: -3, 9: 4},
    {0: -3, 3: 2, 6: 3, 7: -2},
    {3: -1, 4: 3, 5: -4, 9: 2},
    {0: 2, 4: 2, 6: 1, 8: -1},
)
WIDTH = 32.5
LEFT, RIGHT = 3.5, 20.0  # position 0 of the two columns of strips
TOP = 1.2  # the first line
BLOCK = 8.5  # height of four strips with their heading, and of what stands beside them


def merged(*vectors: Vector) -> Vector:
    """Return the sum of vectors, with entries whose sum is zero."""
    positions = sorted(set().union(*vectors))
    return {position: sum(vector.get(position, 0) for vector in vectors) for position in positions}


def largest(vector: Vector, k: int) -> Vector:
    """Return the entries with the k largest magnitudes; ties go to the lower position."""
    kept = sorted(vector, key=lambda position: (-abs(vector[position]), position))[:k]
    return {position: vector[position] for position in sorted(kept)}


def without(vector: Vector, positions: Vector) -> Vector:
    """Return the entries at other positions."""
    return {position: value for position, value in vector.items() if position not in positions}


def strips(picture: Picture, x: float, y: float, title: str, vectors: Mapping[int, Vector]) -> None:
    """Draw the vectors of the ranks below each other, in the ranks' colors."""
    picture.title(x, y, title)
    picture.positions(x, y + 0.9)
    for row, (rank, vector) in enumerate(vectors.items()):
        picture.strip(x, y + 1.4 + row * ROW, f"rank {rank}", vector, FILLS[rank])


def result(picture: Picture, x: float, y: float, title: str, total: Vector) -> None:
    """Draw the vector that every rank ends with."""
    picture.title(x, y, title)
    picture.positions(x, y + 0.9)
    picture.strip(x, y + 1.4, "total", total, GREY)


def patterns(picture: Picture, x: float, y: float, title: str, steps: Sequence[Sequence[Message]]) -> None:
    """Draw messages from rank to rank, step by step, next to four strips."""
    picture.title(x, y, title)
    for number, messages in enumerate(steps):
        picture.pattern(x + 4.3 * number - 0.4, y + 1.3, f"step {number + 1}", messages)


def ring() -> list[list[Message]]:
    """Messages of a ring, in the colour of the block that each passes on."""
    ranks = range(RANKS)
    return [[(rank, (rank + 1) % RANKS, EDGES[(rank - step) % RANKS]) for rank in ranks] for step in ranks[:-1]]


def rotation() -> list[list[Message]]:
    """Messages to the owners, in the owner's colour."""
    ranks = range(RANKS)
    return [[(rank, (rank + step) % RANKS, EDGES[(rank + step) % RANKS]) for rank in ranks] for step in ranks[1:]]


def split(picture: Picture, bounds: Sequence[int], kept: Vector, title: str) -> list[Vector]:
    """Draw the part that TopkDSA and Ok-Topk share; return the sums of the regions by owner."""
    owners = [rank for rank, span in enumerate(pairwise(bounds)) for _ in range(*span)]
    picture.title(LEFT, TOP, "1. Selected; framed: the regions")
    picture.positions(LEFT, TOP + 0.9)
    for rank, vector in enumerate(SELECTED):
        colours = {position: FILLS[owners[position]] for position in vector}
        picture.strip(LEFT, TOP + 1.4 + rank * ROW, f"rank {rank}", vector, colours)
    for rank, (begin, end) in enumerate(pairwise(bounds)):
        picture.frame(LEFT + begin, TOP + 1.2, end - begin, 3 * ROW + 1.4, EDGES[rank])
    patterns(picture, RIGHT, TOP, "2. Entries go to the owners of regions", rotation())
    everything, y = merged(*SELECTED), TOP + BLOCK
    sums: list[Vector] = [{at: everything[at] for at in range(*span) if at in everything} for span in pairwise(bounds)]
    picture.title(LEFT, y, title)
    picture.positions(LEFT, y + 0.9)
    for rank, span in enumerate(pairwise(bounds)):
        row = y + 1.4 + rank * ROW
        picture.strip(LEFT, row, f"rank {rank}", sums[rank], FILLS[rank], span, without(sums[rank], kept))
    patterns(picture, RIGHT, y, "4. Then round the ring to every rank", ring())
    return sums


def topka() -> None:
    """Everybody's entries go to everybody."""
    picture = Picture(WIDTH, TOP + BLOCK + 3.2, SIZE)
    strips(picture, LEFT, TOP, "1. Selected", dict(enumerate(SELECTED)))
    patterns(picture, RIGHT, TOP, "2. Blocks go round the ring", ring())
    result(picture, LEFT, TOP + BLOCK, "3. Total, added up on every rank", merged(*SELECTED))
    save(picture.figure, "topka")


def topkdsa() -> None:
    """Equal regions, gathered sparse or dense."""
    picture = Picture(WIDTH, TOP + 2 * BLOCK + 3.2, SIZE)
    bounds = range(0, SIZE + 1, SIZE // RANKS)
    total = merged(*SELECTED)
    sums = split(picture, bounds, total, "3. Sums of the owners")
    for rank, (begin, end) in enumerate(pairwise(bounds)):
        entries, width = len(sums[rank]), end - begin
        sent = f"{width} values" if 4 * width <= 8 * entries else "an entry" if entries == 1 else f"{entries} entries"
        side, align = (end + 0.4, "left") if rank < RANKS // 2 else (begin - 0.4, "right")
        picture.note(LEFT + side, TOP + BLOCK + 1.9 + rank * ROW, f"sent as {sent}", align, "#444444", 8.5)
    result(picture, LEFT, TOP + 2 * BLOCK, "Total, on every rank", total)
    save(picture.figure, "topkdsa")


def oktopk() -> None:
    """Regions with about equally many entries, a global threshold, and what comes back."""
    picture = Picture(WIDTH, TOP + 3 * BLOCK - 0.8, SIZE)
    # Each rank proposes the positions of its entries 1, 2 and 3; the boundaries are the means, rounded down.
    proposals = zip(*(list(vector)[1:] for vector in SELECTED), strict=True)
    bounds = [0, *(sum(positions) // RANKS for positions in proposals), SIZE]
    total = largest(merged(*SELECTED), K)
    threshold = min(map(abs, total.values()))
    split(picture, bounds, total, f"3. Sums; those below {threshold} stay behind")
    result(picture, LEFT, TOP + 2 * BLOCK, "Total, on every rank", total)
    returned = {rank: without(vector, total) for rank, vector in enumerate(SELECTED)}
    strips(picture, RIGHT, TOP + 2 * BLOCK, "Returned to those who selected it", returned)
    save(picture.figure, "oktopk")


def gtopk() -> None:
    """Draw a tree of merges, up and down."""
    picture = Picture(WIDTH, TOP + 2 * BLOCK + 5.4, SIZE)
    strips(picture, LEFT, TOP, "1. Selected", dict(enumerate(SELECTED)))
    picture.title(RIGHT, TOP, f"2. Ranks 0 and 2 merge and keep {K}")
    picture.positions(RIGHT, TOP + 0.9)
    sums = {rank: merged(SELECTED[rank], SELECTED[rank + 1]) for rank in (0, 2)}
    kept = {rank: largest(vector, K) for rank, vector in sums.items()}
    for rank, vector in sums.items():
        y = TOP + 1.4 + rank * ROW
        picture.strip(RIGHT, y, f"rank {rank}", vector, FILLS[rank], faint=without(vector, kept[rank]))
        picture.arrow((LEFT + SIZE + 0.3, y + ROW + 0.5), (RIGHT - 2.7, y + 0.6), EDGES[rank + 1])
    top = merged(*kept.values())
    total = largest(top, K)
    picture.title(LEFT, TOP + BLOCK, "The messages")
    levels = ([(1, 0), (3, 2)], [(2, 0)], [(0, 2)], [(0, 1), (2, 3)])
    for number, (name, pairs) in enumerate(zip(("2. up", "3. up", "4. down", "5. down"), levels, strict=True)):
        picture.pattern(LEFT + 7.5 * number, TOP + BLOCK + 0.6, name, [(a, b, EDGES[a]) for a, b in pairs])
    y = TOP + BLOCK + 7
    picture.title(LEFT, y, f"3. Rank 0 merges again and keeps {K}")
    picture.positions(LEFT, y + 0.9)
    picture.strip(LEFT, y + 1.4, "rank 0", top, FILLS[0], faint=without(top, total))
    result(picture, LEFT, y + 3.9, "4., 5. Total, sent down to every rank", total)
    dropped = {0: merged(without(sums[0], kept[0]), without(top, total)), 2: without(sums[2], kept[2])}
    strips(picture, RIGHT, y, "Returned: what ranks 0 and 2 dropped", dropped)
    save(picture.figure, "gtopk")


def hierarchical() -> None:
    """Nodes first, then their first ranks."""
    picture = Picture(WIDTH, TOP + 2 * BLOCK + 3.6, SIZE)
    picture.title(LEFT, TOP, "1. Selected, on nodes of two ranks")
    picture.title(RIGHT, TOP, "2. Sums of the nodes")
    picture.positions(LEFT, TOP + 0.9)
    picture.positions(RIGHT, TOP + 0.9)
    sums = {rank: merged(SELECTED[rank], SELECTED[rank + 1]) for rank in (0, 2)}
    for rank, vector in sums.items():
        y = TOP + 1.4 + rank * (ROW + 0.3)
        picture.frame(0.4, y - 0.25, LEFT + SIZE - 0.1, ROW + 1.5)
        for row in (0, 1):
            picture.strip(LEFT, y + row * ROW, f"rank {rank + row}", SELECTED[rank + row], FILLS[rank + row])
        picture.strip(RIGHT, y, f"rank {rank}", vector, FILLS[rank])
        picture.arrow((LEFT + SIZE + 0.6, y + 0.5), (RIGHT - 2.7, y + 0.5))
    picture.title(LEFT, TOP + BLOCK, "The messages")
    levels = ([(0, 1), (1, 0), (2, 3), (3, 2)], [(0, 2), (2, 0)], [(0, 1), (2, 3)])
    for number, (name, pairs) in enumerate(zip(("2. inner", "3. outer", "4. broadcast"), levels, strict=True)):
        picture.pattern(LEFT + 7.5 * number, TOP + BLOCK + 0.6, name, [(a, b, EDGES[a]) for a, b in pairs])
    total, y = largest(merged(*SELECTED), K), TOP + BLOCK + 7
    result(picture, LEFT, y, "3., 4. Total, on every rank", total)
    returned = {rank: without(vector, total) for rank, vector in sums.items()}
    strips(picture, RIGHT, y, "Returned to the nodes' first ranks", returned)
    save(picture.figure, "hierarchical")


def allreduce(name: str, title: str, vectors: Sequence[Vector]) -> None:
    """Draw one allreduce of the values at positions that are the same on every rank."""
    picture = Picture(WIDTH, TOP + BLOCK - 1, SIZE)
    strips(picture, LEFT, TOP, title, dict(enumerate(vectors)))
    total = merged(*vectors)
    result(picture, RIGHT, TOP + 1.8, f"2. Total: an allreduce of {len(total)} values", total)
    picture.arrow((LEFT + SIZE + 0.4, TOP + 3.7), (RIGHT - 2.4, TOP + 3.7))
    save(picture.figure, name)


def shared() -> None:
    """One block of positions for all ranks."""
    blocks = ((2, 1, 0, -1), (-1, 3, 2, 0), (0, 1, -4, 2), (1, -2, 1, 1))
    allreduce("shared", "1. The same block on every rank", [dict(enumerate(block, start=5)) for block in blocks])


def dense() -> None:
    """Every position of every rank."""
    rows = [{position: (5 * position + 7 * rank) % 9 - 4 for position in range(SIZE)} for rank in range(RANKS)]
    allreduce("dense", "1. Residual plus gradient, whole", rows)


if __name__ == "__main__":
    for draw in (topka, topkdsa, gtopk, oktopk, hierarchical, shared, dense, volume, auto):
        draw()
