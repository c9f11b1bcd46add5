"""Tokens that merging gives for their own text, told from the merges instead of by merging."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from align.tokenizer._bpe import Merges

_DEEPEST = 1000  # parts of parts looked at for one token; a token of more is not proved


class Whole(dict[int, bool]):
    """Whether a token is proved to be what merging makes of its own text: `whole[token_id]`.

    A symbol is whole. So is what a merge makes of two whole tokens, both made by lower ranks, if no merge can join them before: merging
    the two side by side makes the merges of their own trees in order of rank, until a merge comes up between a right end of the left tree
    and a left end of the right one. Each such pair that stands side by side at some time is looked at. Where a file has several merges
    for a token, the last is looked at; False says that nothing is proved.
    """

    def __init__(self, vocab: dict[str, int], merges: "Merges") -> None:
        super().__init__()
        self._vocab, self._merges = vocab, merges
        self._ranks: dict[int, int] = {}

    def __missing__(self, token: int) -> bool:
        if not self:  # made when it is first needed
            self.update((i, True) for text, i in self._vocab.items() if len(text) == 1)
            self._ranks = dict(zip(self._merges.made, range(len(self._merges.lefts)), strict=False))
            if token in self:
                return True
        rank = self._ranks.get(token)
        if rank is None:
            self[token] = False
            return False
        if self._merges.lefts[rank] not in self or self._merges.rights[rank] not in self:
            self._look_at_parts(token)
        left, right = self._merges.lefts[rank], self._merges.rights[rank]
        low = self._ranks.get(left, -1) < rank > self._ranks.get(right, -1)
        self[token] = proved = low and self.get(left, False) and self.get(right, False) and not self._joined(left, right, rank)
        return proved

    def _look_at_parts(self, token: int) -> None:
        """Asks for the parts of parts first; not by recursion, as a file's trees may be deep."""
        parts: list[int] = []
        waiting = [token]
        while waiting and len(parts) < _DEEPEST:
            part = waiting.pop()
            if part not in self:
                parts.append(part)
                rank = self._ranks.get(part)
                if rank is not None:
                    waiting += (self._merges.lefts[rank], self._merges.rights[rank])
        for part in reversed(parts[1:]):
            self[part]

    def _joined(self, left: int, right: int, rank: int) -> bool:
        """Whether a merge joins the two before `rank`."""
        rank_of, (rows, _, lefts, rights) = self._ranks.get, self._merges
        left_until = right_until = rank  # when each goes into a larger part; of two merges of one rank the left one comes first
        left_rank, right_rank = rank_of(left, -1), rank_of(right, -1)
        while True:
            if left_rank > right_rank:
                left_until, left = left_rank, rights[left_rank]
                left_rank = rank_of(left, -1)
            elif right_rank >= 0:
                right_until, right = right_rank, lefts[right_rank]
                right_rank = rank_of(right, -1)
            else:
                return False
            found = rows[left].get(right)
            if found is not None and found < left_until and found <= right_until:
                return True
