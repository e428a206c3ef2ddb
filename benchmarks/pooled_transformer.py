"""A transformer decoder whose requests are stepped together, alone, or by hand in NumPy and PyTorch.

Each layer has attention with several heads and a cache of keys and values, and a wider layer. A prompt is one product
for all of its words. Caches lie as ``[heads, room, width of a head]``, so that a head reads its keys side by side.
Words are the most likely, or sampled by the seed of the request. By hand, live rows are stepped side by side, and
attention reads as far as the longest of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import asyncflow as af
from benchmarks.harness import ASYNCFLOW, Figure, Result, Sample, Trial, compare
from benchmarks.peers import NO_PEERS, TORCH, Peers
from benchmarks.pooled_loop import ALONE, BY_HAND, TIME, trial_of

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]
    Request = tuple[Array, int, int]
    Numbers = Any
    """A tensor, or an array: hidden layers are written once for both."""

AT_END = "results at the end"
GAP = Figure("99th percentile of the gap between words", "ms")
WORDS, TEMPERATURE, DRAW = 97, 0.8, 7
NOTHING = 0
"""A word that fills places without one."""


async def measure(
    peers: Peers = NO_PEERS,
    *,
    repeats: int = 5,
    width: int = 128,
    layers: int = 4,
    heads: int = 4,
    room: int = 192,
    clients: tuple[int, ...] = (1, 16),
    requests: int = 48,
    prompts: tuple[int, int] = (5, 100),
    lengths: tuple[int, int] = (20, 60),
    late: int = 40,
) -> list[Result]:
    """Milliseconds of all requests: with a pool, streamed, without a pool, and by hand.

    Args:
        peers: systems that take part.
        repeats: measured trials of each system.
        width: of the hidden layers.
        layers: of attention.
        heads: of each.
        room: of a cache.
        clients: numbers of requests at a time.
        requests: of all clients.
        prompts: the shortest and the longest.
        lengths: words that are asked for, at least and at most.
        late: requests of 50 words that come every 20 ms while others stream; 0 leaves that out.
    """
    random = np.random.default_rng(1)
    sizes = [random.integers(low, high + 1, requests) for low, high in (prompts, lengths)]
    asked = [(random.integers(0, WORDS, m), int(n), k) for k, (m, n) in enumerate(zip(*sizes, strict=True))]
    decoder = Decoder.of(width, layers, heads, room)
    found = []
    with af.Graph() as graph:
        prompt, n, seed = fed = [af.placeholder("int64", (None,)), *(af.placeholder("int64", ()) for _ in range(2))]
        alone, pooled = (decoder.loop(prompt, n, pool) for pool in (None, af.Pool(max(clients))))
        alone_sampled, sampled = (decoder.loop(prompt, n, pool, seed) for pool in (None, af.Pool(max(clients))))
    async with af.Session(graph) as session:
        for each in clients:
            at_end = session.prepare(pooled.words, fed)
            trials = {
                ASYNCFLOW: trial_of(at_end, asked, each),
                ALONE: trial_of(session.prepare(alone.words, fed), asked, each),
                BY_HAND: _by_hand_trial(decoder, asked, each),
            }
            if peers.torch is not None:
                trials[TORCH] = _by_torch_trial(peers.torch, decoder, asked, each)
            streamed = {
                ASYNCFLOW: _streaming_trial(session, pooled.word, fed, room, asked, each),
                AT_END: trials[ASYNCFLOW],
                BY_HAND: trials[BY_HAND],
            }
            drawn = {
                ASYNCFLOW: trial_of(session.prepare(sampled.words, fed), asked, each),
                ALONE: trial_of(session.prepare(alone_sampled.words, fed), asked, each),
            }
            case = f"{width} wide, {layers} layers, {requests} prompts, {each} at a time"
            for what, systems in ((case, trials), (f"{case}, streamed", streamed), (f"{case}, sampled", drawn)):
                found += await compare("pooled_transformer", what, systems, repeats=repeats)
        if late:
            trial = _gaps_trial(session, pooled, fed, max(clients), late, room)
            case = f"{width} wide, {layers} layers, {late} prompts of 50 words, one every 20 ms"
            found += await compare("pooled_transformer", case, {ASYNCFLOW: trial}, repeats=repeats)
    return found


class Decoded(NamedTuple):
    """A loop that decodes: all words at its end, and the word of each iteration."""

    words: af.Tensor
    word: af.Tensor


class Layer(NamedTuple):
    """Weights of one layer."""

    scale: Array
    bias: Array
    ask: Array
    key: Array
    value: Array
    mix: Array
    scale_wide: Array
    bias_wide: Array
    wide: Array
    narrow: Array


class Decoder(NamedTuple):
    """A model: its embeddings, the embeddings of positions, its layers, and the number of heads of each."""

    words: Array
    places: Array
    layers: tuple[Layer, ...]
    heads: int

    @staticmethod
    def of(width: int, layers: int, heads: int, room: int) -> Decoder:
        """A random one."""
        random, w = np.random.default_rng(0), width

        def weights(*shape: int) -> Array:
            found: Array = (random.normal(size=shape) / shape[0] ** 0.5).astype(np.float32)
            return found

        def layer() -> Layer:
            ones, zeros = np.ones(w, np.float32), np.zeros(w, np.float32)
            ask, key, value, mix = (weights(w, w) for _ in range(4))
            return Layer(ones, zeros, ask, key, value, mix, ones, zeros, weights(w, 4 * w), weights(4 * w, w))

        words, places = (random.normal(size=(n, w)).astype(np.float32) for n in (WORDS, room))
        return Decoder(words, places, tuple(layer() for _ in range(layers)), heads)

    @property
    def room(self) -> int:
        """Number of words that a cache has room for."""
        return len(self.places)

    def loop(self, prompt: af.Tensor, n: af.Tensor, pool: af.Pool | None, seed: af.Tensor | None = None) -> Decoded:
        """Return the words of `n` steps, in an array of `room`; with a seed, words are sampled."""
        last, width = af.shape(prompt)[0] - 1, self.words.shape[1]
        of_heads = (self.heads, width // self.heads)
        empty = af.zeros((self.heads, self.room, of_heads[1]), dtype="float32")
        caches: list[af.Tensor] = []

        def fill(layer: Layer, asked: af.Tensor, key: af.Tensor, value: af.Tensor) -> af.Tensor:
            q, k, v = (af.permute_dims(af.reshape(x, (-1, *of_heads)), (1, 0, 2)) for x in (asked, key, value))
            caches.extend(af.index_update(empty, (slice(None), slice(None, last + 1)), x) for x in (k, v))
            found = af.nn.scaled_dot_product_attention(q, k, v, is_causal=True)
            return af.reshape(af.permute_dims(found, (1, 0, 2)), (-1, width))

        # The last word of the prompt is in the first step, which writes its keys again.
        self.hidden(af, af.take(self.words, prompt, axis=0) + af.constant(self.places)[: last + 1], fill)
        emitted: list[af.Tensor] = []

        def step(at: af.Tensor, word: af.Tensor, words: af.Tensor, *caches: af.Tensor) -> list[af.Tensor]:
            given, following = iter(caches), list[af.Tensor]()

            def attend(layer: Layer, asked: af.Tensor, key: af.Tensor, value: af.Tensor) -> af.Tensor:
                keys, values = (
                    af.index_update(next(given), (slice(None), at), af.reshape(x, of_heads)) for x in (key, value)
                )
                following.extend((keys, values))
                asked = af.reshape(asked, (self.heads, 1, of_heads[1]))
                found = af.nn.scaled_dot_product_attention(asked, keys, values, lengths=at + 1)
                return af.reshape(found, (width,))

            x = af.take(self.words, word, axis=0) + af.take(self.places, at, axis=0)
            logits = self.hidden(af, x, attend) @ self.words.T
            if seed is None:
                word = af.argmax(logits)
            else:
                word = af.random.categorical(logits / TEMPERATURE, seed=(seed, DRAW))
            emitted.append(word)
            return [at + 1, word, af.index_update(words, at - last, word), *following]

        start = (last, prompt[-1], af.full((self.room,), NOTHING, dtype="int64"), *caches)
        found = af.while_loop(lambda at, *_: at < last + n, step, start, pool=pool)
        return Decoded(found[2], emitted[0])

    def hidden(self, xp: Any, x: Numbers, attend: Callable[[Layer, Numbers, Numbers, Numbers], Numbers]) -> Numbers:
        """Return the last hidden layer; `attend` gets a layer, and its queries, keys and values."""
        for layer in self.layers:
            y = xp.layer_norm(x, layer.scale, layer.bias)
            x = x + attend(layer, y @ layer.ask, y @ layer.key, y @ layer.value) @ layer.mix
            x = x + xp.relu(xp.layer_norm(x, layer.scale_wide, layer.bias_wide) @ layer.wide) @ layer.narrow
        return x


class Hands:
    """NumPy as a server by hand uses it."""

    def __init__(self, module: Any = np) -> None:
        self.module = module

    def weights(self, decoder: Decoder) -> Decoder:
        """Return a decoder whose weights are arrays of this library."""
        return decoder

    def layer_norm(self, x: Numbers, scale: Numbers, bias: Numbers) -> Numbers:
        """As `asyncflow.layer_norm`."""
        x = x - x.mean(axis=-1, keepdims=True)
        return x / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + np.float32(1e-5)) * scale + bias

    def relu(self, x: Numbers) -> Numbers:
        """As `asyncflow.relu`."""
        return np.maximum(x, np.float32(0))

    def attend(self, q: Numbers, k: Numbers, v: Numbers, seen: Array) -> Numbers:
        """Return attention over the keys that are `seen`."""
        scores = q * np.float32(q.shape[-1] ** -0.5) @ k.swapaxes(-1, -2)
        scores = np.where(seen, scores, np.float32(-np.inf))
        scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
        return scores / scores.sum(axis=-1, keepdims=True) @ v

    def zeros(self, shape: tuple[int, ...]) -> Numbers:
        """An array of zeros."""
        return np.zeros(shape, np.float32)

    def best(self, logits: Numbers) -> Array:
        """Return the most likely words."""
        found: Array = logits.argmax(-1)
        return found


class TorchHands(Hands):
    """PyTorch, eager, as the same server uses it."""

    def weights(self, decoder: Decoder) -> Decoder:
        """Return a decoder whose weights are tensors."""
        given = self.module.from_numpy
        layers = tuple(Layer(*map(given, layer)) for layer in decoder.layers)
        return decoder._replace(words=given(decoder.words), places=given(decoder.places), layers=layers)

    def layer_norm(self, x: Numbers, scale: Numbers, bias: Numbers) -> Numbers:
        """As `asyncflow.layer_norm`."""
        return self.module.nn.functional.layer_norm(x, scale.shape, scale, bias)

    def relu(self, x: Numbers) -> Numbers:
        """As `asyncflow.relu`."""
        return self.module.relu(x)

    def attend(self, q: Numbers, k: Numbers, v: Numbers, seen: Array) -> Numbers:
        """Return attention over the keys that are `seen`."""
        mask = self.module.from_numpy(seen)
        return self.module.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    def zeros(self, shape: tuple[int, ...]) -> Numbers:
        """A tensor of zeros."""
        return self.module.zeros(shape)

    def best(self, logits: Numbers) -> Array:
        """Return the most likely words."""
        found: Array = logits.argmax(-1).numpy()
        return found


def by_hand(hands: Hands, decoder: Decoder, requests: list[Request], capacity: int) -> Array:
    """Return the words of all requests: live rows side by side, the last one in the place of a row that ends.

    Args:
        hands: the library to compute with.
        decoder: the model, with weights of that library.
        requests: of all clients.
        capacity: rows of the slabs.
    """
    room, heads, width = decoder.room, decoder.heads, decoder.words.shape[1]
    caches = [hands.zeros((capacity, heads, room, width // heads)) for _ in range(2 * len(decoder.layers))]
    at, word, start, end = np.zeros((4, capacity), np.int64)
    answers, owners = np.full((len(requests), room), NOTHING), list[int]()
    waiting = list(range(len(requests)))[::-1]
    while waiting or owners:
        while waiting and len(owners) < capacity:
            row, number = len(owners), waiting.pop()
            prompt, n, _ = requests[number]
            last = len(prompt) - 1
            _prefill(hands, decoder, prompt, iter(caches), row)
            at[row], word[row], start[row], end[row] = last, prompt[-1], last, last + n
            owners.append(number)
        live = len(owners)
        word[:live] = _step(hands, decoder, word[:live], at[:live], iter(caches))
        answers[owners, at[:live] - start[:live]] = word[:live]
        at[:live] += 1
        for row in reversed(np.flatnonzero(at[:live] >= end[:live])):
            last, number = len(owners) - 1, owners.pop()
            if row < last:
                owners[row] = number
                for slab in (*caches, at, word, start, end):
                    slab[row] = slab[last]
    return answers


def _prefill(hands: Hands, decoder: Decoder, prompt: Array, caches: Iterator[Numbers], row: int) -> None:
    heads, length, width = decoder.heads, len(prompt), decoder.words.shape[1]
    seen = np.tri(length, dtype=bool)

    def fill(layer: Layer, *parts: Numbers) -> Numbers:
        q, k, v = (x.reshape(length, heads, -1).swapaxes(0, 1) for x in parts)
        for x in (k, v):
            next(caches)[row, :, :length] = x
        return hands.attend(q, k, v, seen).swapaxes(0, 1).reshape(length, width)

    decoder.hidden(hands, decoder.words[prompt] + decoder.places[:length], fill)


def _step(hands: Hands, decoder: Decoder, word: Array, at: Array, caches: Iterator[Numbers]) -> Array:
    live, heads, width = len(word), decoder.heads, decoder.words.shape[1]
    longest = int(at.max()) + 1
    seen, rows = (np.arange(longest) <= at[:, None])[:, None, None], np.arange(live)

    def attend(layer: Layer, asked: Numbers, *parts: Numbers) -> Numbers:
        filled: list[Numbers] = []
        for x in parts:
            cache = next(caches)
            cache[rows, :, at] = x.reshape(live, heads, -1)
            filled.append(cache[:live, :, :longest])
        keys, values = filled
        return hands.attend(asked.reshape(live, heads, 1, -1), keys, values, seen).reshape(live, width)

    x = decoder.hidden(hands, decoder.words[word] + decoder.places[at], attend)
    return hands.best(x @ decoder.words.T)


def _by_hand_trial(decoder: Decoder, asked: list[Request], clients: int) -> Trial:
    return _server_trial(Hands(), decoder, asked, clients)


def _by_torch_trial(torch: Any, decoder: Decoder, asked: list[Request], clients: int) -> Trial:
    hands = TorchHands(torch)
    with_weights = hands.weights(decoder)

    async def trial() -> Sample:
        with torch.inference_mode():
            return await _server_trial(hands, with_weights, asked, clients)()

    return trial


def _server_trial(hands: Hands, decoder: Decoder, asked: list[Request], clients: int) -> Trial:
    async def trial() -> Sample:
        started = perf_counter()
        answers = by_hand(hands, decoder, asked, clients)
        return Sample({TIME: (perf_counter() - started) * 1e3}, answers)

    return trial


def _streaming_trial(
    session: af.Session, word: af.Tensor, fed: list[af.Tensor], room: int, asked: list[Request], clients: int
) -> Trial:
    """Clients that stream the words of one request after the other."""

    async def trial() -> Sample:
        left, answers = iter(enumerate(asked)), np.full((len(asked), room), NOTHING)

        async def client() -> None:
            for number, request in left:
                at = 0
                async for each in session.stream(word, dict(zip(fed, request, strict=True))):
                    answers[number, at] = each
                    at += 1

        started = perf_counter()
        await asyncio.gather(*(client() for _ in range(clients)))
        return Sample({TIME: (perf_counter() - started) * 1e3}, answers)

    return trial


async def _last(words: AsyncIterator[Array]) -> None:
    """Take all words."""
    async for _ in words:
        pass


def _gaps_trial(
    session: af.Session, decoded: Decoded, fed: list[af.Tensor], clients: int, late: int, room: int
) -> Trial:
    """Half of the clients stream long answers, while short ones with prompts of 50 words arrive every 20 ms."""
    random = np.random.default_rng(3)

    async def trial() -> Sample:
        gaps, has_ended = list[float](), asyncio.Event()

        async def reader() -> None:
            while not has_ended.is_set():
                feeds = dict(zip(fed, (random.integers(0, WORDS, 5), room - 8, 0), strict=True))
                async with aclosing(session.stream(decoded.word, feeds)) as words:
                    before = None
                    async for _ in words:
                        now = perf_counter()
                        if before is not None:
                            gaps.append((now - before) * 1e3)
                        before = now
                        if has_ended.is_set():
                            break

        async def arrivals() -> None:
            asked = []
            for k in range(late):
                feeds = dict(zip(fed, (random.integers(0, WORDS, 50), 8, k), strict=True))
                asked.append(asyncio.ensure_future(_last(session.stream(decoded.word, feeds))))
                await asyncio.sleep(0.02)
            await asyncio.gather(*asked)
            has_ended.set()

        await asyncio.gather(*(reader() for _ in range(max(1, clients // 2))), arrivals())
        return Sample({GAP: float(np.percentile(gaps, 99))})

    return trial
