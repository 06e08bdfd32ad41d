"""A model's sizes and operations, and the layouts that it can have."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.base.errors import UsageError
from launcher.runs.plan import layout
from launcher.runs.plan.model_size import ModelShape, shape
from launcher.runs.runfile.config import ImageRequest, Model, Nodes, Parallel, RunConfig, Training
from launcher.runs.runfile.origins import Origin
from tests.tables import table

UPSTREAM = "/opt/megatron/src/pretrain_gpt.py"
SMALL: dict[str, Any] = {
    "num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 32,
    "vocab_size": 100,
}  # fmt: skip
THEIRS = SMALL | {"tokenizer_type": "GPT2BPETokenizer"}


GPT2 = ModelShape(
    layers=12, hidden=768, ffn=3072, heads=12, groups=12, head=64, sequence=512, vocabulary=50304,
)  # fmt: skip


def test_operations_by_sizes_and_beyond_the_paper() -> None:
    whole, tokens = GPT2.operations(16), 16 * 512
    # Of twice the tokens, each has scores with 512 more, which are computed and used.
    longer = replace(GPT2, sequence=1024).operations(16)
    assert longer - 2 * whole == 6 * 2 * tokens * 12 * 2 * 512 * 768
    # Three groups for twelve heads: keys and values are a quarter as wide, 1.5 · 768² less.
    grouped = replace(GPT2, groups=3).operations(16)
    assert whole - grouped == 6 * tokens * 12 * 1.5 * 768**2
    # A gated MLP has a third product of 768 · 3072.
    gated = replace(GPT2, gated=True).operations(16)
    assert gated - whole == 6 * tokens * 12 * 768 * 3072
    # Six of twelve layers pass each token through two experts of 1024, and one shared of 512.
    experts = replace(GPT2, expert_layers=6, routed=2, expert_ffn=1024, shared_ffn=512)
    less = 6 * 2 * 768 * (3072 - 2 * 1024 - 512)
    assert whole - experts.operations(16) == 6 * tokens * less


@pytest.mark.parametrize(
    ("program", "options", "sizes"),
    [
        ("gpt", {}, {"ffn": 256, "groups": 4, "head": 16, "vocabulary": 128, "positions": 32}),
        ("gpt", {"tensor_model_parallel_size": 2, "num_query_groups": 2, "ffn_hidden_size": "96"},
         {"vocabulary": 256, "groups": 2, "ffn": 96}),
        ("gpt", {"make_vocab_size_divisible_by": 8}, {"vocabulary": 104}),
        (UPSTREAM, {}, {"vocabulary": 50304, "groups": 4}),
        # Megatron's own sizes: 8/3 of 64, in 64s; 50257 in 256s.
        (UPSTREAM, {"tensor_model_parallel_size": 2, "swiglu": True, "kv_channels": 32},
         {"ffn": 128, "head": 32, "gated": True, "vocabulary": 50432}),
        # Upstream groups queries only where told to, and then into one group by default.
        (UPSTREAM, {"num_query_groups": 2}, {"groups": 4}),
        (UPSTREAM, {"group_query_attention": True, "num_query_groups": 2}, {"groups": 2}),
        (UPSTREAM, {"group_query_attention": True}, {"groups": 1}),
        (UPSTREAM, {"tokenizer_type": "NullTokenizer", "vocab_size": 255}, {"vocabulary": 256}),
        (UPSTREAM, {"num_experts": 8, "moe_layer_freq": 2, "moe_ffn_hidden_size": 48,
                    "moe_shared_expert_intermediate_size": 16},
         {"expert_layers": 1, "routed": 2, "expert_ffn": 48, "shared_ffn": 16}),
        (UPSTREAM, {"disable_bias_linear": True, "normalization": "RMSNorm",
                    "untie_embeddings_and_output_weights": True,
                    "position_embedding_type": "rope"},
         {"bias": False, "norm_bias": False, "tied": False, "positions": 0}),
    ],
)  # fmt: skip
def test_the_sizes_of_options(
    program: str, options: dict[str, Any], sizes: dict[str, object]
) -> None:
    found = shape(program, (SMALL if program == "gpt" else THEIRS) | options)
    assert found
    assert {name: getattr(found, name) for name in sizes} == sizes


@pytest.mark.parametrize(
    ("program", "options"),
    [
        ("", SMALL),
        ("./mine.py", SMALL),
        ("pretrain_bert.py", SMALL),
        ("gpt", {"num_layers": 2}),
        ("gpt", SMALL | {"num_layers": "many"}),
        ("gpt", SMALL | {"num_layers": True}),
        ("gpt", SMALL | {"num_layers": 1e-3}),
        ("gpt", SMALL | {"num_layers": [2, 3]}),
        ("gpt", SMALL | {"num_attention_heads": 0}),
        (UPSTREAM, {k: v for k, v in SMALL.items() if k != "vocab_size"}),
        (UPSTREAM, THEIRS | {"multi_latent_attention": True}),
        (UPSTREAM, THEIRS | {"use_checkpoint_args": True}),
        (UPSTREAM, THEIRS | {"tensor_model_parallel_size": 0}),
        (UPSTREAM, THEIRS | {"num_experts": 8, "moe_layer_freq": "[0]+[1]"}),
    ],
)
def test_what_isnt_known_isnt_guessed(program: str, options: dict[str, Any]) -> None:
    assert shape(program, options) is None
    told = shape(UPSTREAM, SMALL | {"tokenizer_type": "HuggingFaceTokenizer"}, 32000)
    assert told
    assert told.vocabulary == 32000  # as a log has it


@given(
    st.dictionaries(
        st.sampled_from(sorted({*SMALL, "kv_channels", "num_experts", "tokenizer_type"})),
        st.one_of(st.booleans(), st.integers(-2, 2), st.floats(), st.just("9" * 400), st.text()),
    )
)
def test_no_option_breaks_it(options: dict[str, Any]) -> None:
    for program in ("gpt", UPSTREAM):
        shape(program, THEIRS | options)


ORIGIN = Origin("run.yaml", {"model.num_attention_heads": 7}, {})
FEW = st.integers(1, 12)


def config(
    tp: int = 1,
    pp: int = 1,
    cp: int = 1,
    *,
    heads: int | None = None,
    layers: int | None = None,
    micro: int | str | None = None,
    whole: int | None = None,
    nodes: int = 1,
    **training: object,
) -> RunConfig:
    return RunConfig(
        name="a",
        image=ImageRequest(tag="cpu"),
        gpus="1",
        nodes=Nodes(count=nodes, master_addr="a"),
        model=Model(num_attention_heads=heads, num_layers=layers),
        training=Training(micro_batch_size=micro, global_batch_size=whole, **training),
        parallel=Parallel(
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            context_parallel_size=cp,
        ),
    )


def refusal(wrong: RunConfig, processes: int) -> str:
    with pytest.raises(UsageError) as caught:
        layout.refuse(layout.faults(wrong, layout.layout(wrong, processes)), ORIGIN)
    return str(caught.value)


def works(right: RunConfig, processes: int) -> bool:
    try:
        layout.refuse(layout.faults(right, layout.layout(right, processes)), ORIGIN)
    except UsageError:
        return False
    return True


@given(FEW, st.integers(1, 3), FEW, FEW, st.integers(1, 3))
def test_the_world_is_a_whole_number_of_replicas(
    processes: int, nodes: int, tp: int, pp: int, cp: int
) -> None:
    expected = processes * nodes % (tp * pp * cp) == 0
    assert works(config(tp, pp, cp, nodes=nodes), processes) == expected


@given(st.integers(1, 40), st.integers(1, 40), FEW, FEW)
def test_heads_and_layers_are_dealt_out_evenly(heads: int, layers: int, tp: int, pp: int) -> None:
    even = len({len(range(r, heads, tp)) for r in range(tp)}) == 1
    even = even and len({len(range(s, layers, pp)) for s in range(pp)}) == 1
    assert works(config(tp, pp, heads=heads, layers=layers), tp * pp) == even


@given(st.integers(1, 64), FEW, FEW, st.integers(1, 3))
def test_a_global_batch_is_whole_micro_batches_on_each_replica(
    whole: int, micro: int, replicas: int, tp: int
) -> None:
    expected = whole in range(micro * replicas, 65, micro * replicas)
    assert works(config(tp, micro=micro, whole=whole), replicas * tp) == expected


@given(st.integers(1, 200), FEW)
def test_auto_is_the_largest_micro_batch_up_to_16_that_works(share: int, replicas: int) -> None:
    chosen = config(micro="auto", whole=share * replicas)
    size = layout.micro_batch(chosen, layout.layout(chosen, replicas))
    fitting = [n for n in range(1, 17) if works(config(micro=n, whole=share * replicas), replicas)]
    assert size == max(fitting)


@given(st.integers(1, 5000), st.integers(1, 5000))
def test_the_divisors_offered_divide_and_are_next(whole: int, value: int) -> None:
    divisors = [n for n in range(1, whole + 1) if whole % n == 0]
    expected = [n for n in divisors if n < value][-1:] + [n for n in divisors if n > value][:1]
    assert layout.divisors_near(whole, value) == expected


@given(st.integers(1, 64), FEW, FEW)
def test_what_is_offered_for_a_batch_works(whole: int, micro: int, replicas: int) -> None:
    wrong = config(micro=micro, whole=whole)
    if works(wrong, replicas):
        return
    offered = refusal(wrong, replicas).rpartition("work: ")[2].rstrip(".").split("; or ")
    for size in offered[0].split(" or "):
        assert works(config(micro=micro, whole=int(size)), replicas)
    for more in offered[1:]:
        if more.startswith("micro-batch "):
            for size in more.removeprefix("micro-batch ").split(" or "):
                assert works(config(micro=int(size), whole=whole), replicas)
        else:
            for size in more.removesuffix(" processes in all").split(" or "):
                assert works(wrong, int(size))


def test_a_refusal_names_place_numbers_and_what_works() -> None:
    assert refusal(config(tp=8, heads=12), 8) == (
        "run.yaml: parallel.tensor_model_parallel_size: 12 heads aren't divisible by 8\n"
        "  Nearest values of parallel.tensor_model_parallel_size that work: 6 or 12."
    )
    told = refusal(config(tp=5, pp=3, heads=12, layers=10), 4)
    assert told.count(" work: ") == 3  # every broken rule, at once


@table("training", "key")
def test_settings_that_exclude_each_other(training: dict[str, object], key: str) -> None:
    assert f"{key}: " in refusal(config(**training), 1)


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 64))
def test_a_ramp_reaches_the_global_batch(start: int, increment: int, whole: int) -> None:
    ramp = config(micro=1, whole=whole, rampup_batch_size=[start, increment, 100])
    reached = whole in {*range(start, 65, increment), *range(start, -65, -increment)}
    assert works(ramp, 1) == reached


def test_a_sequence_is_divided_by_context_first() -> None:
    """1000 at TP4 CP2 with sequence parallelism was refused: 1000 / 4, then 500 / 4.

    Without tensor parallelism Megatron turns it off, and upstream's own scripts say it.
    """
    alone = config().model_copy(update={"parallel": Parallel(sequence_parallel=True)})
    assert works(alone, 1)
    sizes = {"tensor_model_parallel_size": 4, "context_parallel_size": 2, "sequence_parallel": True}
    changes = {"parallel": Parallel(**sizes), "model": Model(seq_length=1000)}
    assert works(config().model_copy(update=changes), 8)
    changes["model"] = Model(seq_length=1004)
    assert not works(config().model_copy(update=changes), 8)


@table("groups", "release", "program", "taken")
def test_query_groups_below_tensor_parallel_are_shared_from_0_16_on(
    groups: int, release: str | None, program: str, taken: bool
) -> None:
    model = Model(num_attention_heads=12, num_query_groups=groups)
    few = config(4).model_copy(update={"model": model, "program": program})
    assert (not layout.faults(few, layout.layout(few, 4), release)) == taken


def test_layers_that_the_file_deals_out_itself_are_left_to_it() -> None:
    uneven = config(pp=2, layers=5)
    args = {"decoder_first_pipeline_num_layers": 3}
    assert not works(uneven, 2)
    assert works(uneven.model_copy(update={"megatron_args": args}), 2)
