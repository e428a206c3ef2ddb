"""Beam search for likely sentences, in a language model of the Python reference that this program builds.

The model counts the words that follow each pair of words in the documentation that `help("topics")` shows. The search
starts with two words, keeps the best few beginnings of a sentence, and extends each by its likeliest next words. It
stops when all of them have ended: a loop whose length depends on the data. A second loop then walks back through the
records of the first. Several searches run at the same time, and one of them shows its best beginning after every step.

    python examples/ngram_beam_search.py --output demo-out
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

import asyncflow as af

BEAMS = 6
"""Beginnings kept after each step."""

CHOICES = 12
"""Next words known for each pair of words."""

LONGEST = 24
"""Words a sentence may have after its first two."""

EAGERNESS = 0.5
"""Addition to the score of a sentence for each word; without it the shortest sentence would win."""

Pair: TypeAlias = tuple[str, str]

# -- the model ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Model:
    """A trigram model as an automaton. A state is a pair of words; state 0 is the end of the sentence.

    Each array has a row per state, with one column for each of its `CHOICES` likeliest next words.
    """

    pairs: dict[Pair, int]
    """Number of each state."""
    openings: list[Pair]
    """The pairs that sentences begin with, the most frequent first."""
    words: list[str]
    word: NDArray[np.int64]
    """Position in `words` of the next word."""
    gain: NDArray[np.float64]
    """Its addition to the score; minus infinity where there are fewer choices."""
    state: NDArray[np.int64]
    """The state it leads to."""


def read_sentences() -> Iterator[list[str]]:
    """The sentences of Python's own documentation that hold nothing but words; the code in it is left out."""
    for text in topics.values():
        for sentence in re.split(r"[.:;!?](?=\s)|\n\s*\n", text.lower()):
            words = sentence.split()
            if len(words) > 2 and all(re.fullmatch(r"[a-z]+(?:['-][a-z]+)*,?", word) for word in words):
                yield [*words, "."]


def build_model() -> Model:
    """Counts which word follows which two."""
    follow: defaultdict[Pair, Counter[str]] = defaultdict(Counter)
    openings: Counter[Pair] = Counter()
    for sentence in read_sentences():
        openings[sentence[0], sentence[1]] += 1
        for first, second, third in zip(sentence, sentence[1:], sentence[2:], strict=False):
            follow[first, second][third] += 1

    pairs = {pair: number for number, pair in enumerate(sorted(follow), start=1)}
    words = sorted({".", *(third for counter in follow.values() for third in counter)})
    position = {word: number for number, word in enumerate(words)}
    shape = len(pairs) + 1, CHOICES
    word, gain, state = np.zeros(shape, np.int64), np.full(shape, -np.inf), np.zeros(shape, np.int64)
    word[0], gain[0, 0] = position["."], 0.0  # a sentence that has ended stays as it is
    for (first, second), number in pairs.items():
        counter = follow[first, second]
        for choice, (third, count) in enumerate(counter.most_common(CHOICES)):
            word[number, choice] = position[third]
            gain[number, choice] = np.log(count / counter.total()) + EAGERNESS
            state[number, choice] = pairs.get((second, third), 0)
    return Model(pairs, [pair for pair, _ in openings.most_common()], words, word, gain, state)


# -- the search as a dataflow graph ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Search:
    """A graph, and the tensors in it that we feed, fetch and stream."""

    graph: af.Graph
    start: af.Tensor
    """Feed: the state of the prompt. int64[]"""
    best: af.Tensor
    """Fetch: the words of the best sentence. int64[steps]"""
    score: af.Tensor
    """Fetch: its score. float64[]"""
    step: tuple[af.Tensor, af.Tensor]
    """Stream: for every beam the beginning it extends, and by which word. int64[BEAMS] each"""


def build_search(model: Model) -> Search:
    """The forward loop fills two arrays, the backward loop reads them."""
    with af.Graph() as graph:
        start = af.placeholder("int64", (), name="start")
        word, gain, state = af.constant(model.word), af.constant(model.gain), af.constant(model.state)
        streamed = []

        def unfinished(
            step: af.Tensor, states: af.Tensor, scores: af.Tensor, parents: af.TensorArray, words: af.TensorArray
        ) -> af.Tensor:
            return (step < LONGEST) & af.any(states != 0)

        def extend(
            step: af.Tensor, states: af.Tensor, scores: af.Tensor, parents: af.TensorArray, words: af.TensorArray
        ) -> tuple[af.Tensor, af.Tensor, af.Tensor, af.TensorArray, af.TensorArray]:
            candidates = af.reshape(af.expand_dims(scores, axis=1) + gain[states], (BEAMS * CHOICES,))
            kept = af.argsort(candidates, descending=True)[:BEAMS]
            parent, choice = kept // CHOICES, kept % CHOICES
            origin = states[parent]
            next_word = word[origin, choice]
            streamed.append((parent, next_word))
            return (
                step + 1,
                state[origin, choice],
                candidates[kept],
                parents.write(step, parent),
                words.write(step, next_word),
            )

        states = af.broadcast_to(start, (BEAMS,))
        scores = af.constant([0.0] + [-np.inf] * (BEAMS - 1))  # all beams start alike: one of them is enough
        empty = af.TensorArray("int64", LONGEST, element_shape=(BEAMS,))
        steps, _, scores, parents, words = af.while_loop(
            unfinished, extend, (0, states, scores, empty, empty.identity()), name="search"
        )

        def walk_back(
            step: af.Tensor, beam: af.Tensor, sentence: af.TensorArray
        ) -> tuple[af.Tensor, af.Tensor, af.TensorArray]:
            sentence = sentence.write(step, words.read(step)[beam])
            return step - 1, parents.read(step)[beam], sentence

        sentence = af.TensorArray("int64", steps, element_shape=())
        _, _, sentence = af.while_loop(
            lambda step, beam, sentence: step >= 0,
            walk_back,
            (steps - 1, af.argmax(scores), sentence),
            name="walk_back",
        )
        return Search(graph, start, sentence.stack(), af.max(scores), streamed[0])


async def search_all(search: Search, model: Model, prompts: Sequence[Pair]) -> list[tuple[NDArray[np.int64], float]]:
    """The best sentence for each prompt and its score; the first search is shown step by step meanwhile."""
    starts = [model.pairs[prompt] for prompt in prompts]
    async with af.Session(search.graph) as session:

        async def follow() -> None:
            sentences: list[list[int]] = [[]] * BEAMS
            async for parents, words in session.stream(search.step, {search.start: starts[0]}):
                sentences = [[*sentences[parent], word] for parent, word in zip(parents, words, strict=True)]
                print(f"  {readable(model, prompts[0], sentences[0])}")

        runs = [session.run((search.best, search.score), {search.start: start}) for start in starts]
        _, *found = await asyncio.gather(follow(), *runs)
        return found


# -- the same without a graph ------------------------------------------------------------------------------------------


def search_directly(model: Model, start: int) -> tuple[NDArray[np.int64], float]:
    """Beam search as one would write it in NumPy."""
    states, scores = np.full(BEAMS, start), np.array([0.0] + [-np.inf] * (BEAMS - 1))
    sentences = np.zeros((BEAMS, 0), np.int64)
    while sentences.shape[1] < LONGEST and states.any():
        candidates = (scores[:, None] + model.gain[states]).ravel()
        kept = np.argsort(-candidates, kind="stable")[:BEAMS]
        parent, choice = np.divmod(kept, CHOICES)
        words = model.word[states[parent], choice]
        sentences = np.column_stack((sentences[parent], words))
        states, scores = model.state[states[parent], choice], candidates[kept]
    return sentences[scores.argmax()], float(scores.max())


def readable(model: Model, prompt: Pair, sentence: Iterable[int]) -> str:
    """The sentence as a person would write it, to its first full stop."""
    words = [*prompt, *(model.words[word] for word in sentence)]
    ended = "." in words
    text = " ".join(words[: words.index(".")] if ended else words)
    return text[0].upper() + text[1:] + ("." if ended else " …")


def main(argv: Sequence[str] | None = None) -> int:
    """Gives 0 if NumPy finds the same sentences, else 1."""
    parser = argparse.ArgumentParser(description="Beam search over a trigram model of the Python reference.")
    parser.add_argument("--output", type=Path, default=Path("demo-out"), help="folder for the timeline")
    parser.add_argument("--prompts", type=int, default=8, help="how many searches")
    options = parser.parse_args(argv)

    model = build_model()
    prompts = model.openings[: options.prompts]
    print(f"a model of {len(model.words)} words and {len(model.pairs)} pairs; one search, step by step:")
    with af.Trace() as trace:
        found = af.run(search_all(build_search(model), model, prompts))
    print("\nthe best sentences:")
    for prompt, (sentence, score) in zip(prompts, found, strict=True):
        print(f"  {score:6.2f}  {readable(model, prompt, sentence)}")

    expected = [search_directly(model, model.pairs[prompt]) for prompt in prompts]
    agreed = all(
        np.array_equal(ours, theirs) and np.isclose(our_score, their_score)
        for (ours, our_score), (theirs, their_score) in zip(found, expected, strict=True)
    )
    print(f"\n{'PASS' if agreed else 'FAIL'}: NumPy finds {'the same' if agreed else 'other'} sentences")
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / "ngram_beam_search.html"
    af.profiler.save(trace, path)
    print(f"timeline: open {path.resolve().as_uri()} in a browser")
    return 0 if agreed else 1


if __name__ == "__main__":
    sys.exit(main())
