"""Answers of servers: what is read from them, and everything that keeps one out of a batch."""

import base64
import copy
import json
from pathlib import Path

import numpy as np
import pytest

from experiments.engines.answers import BadAnswer
from experiments.engines.protocol import Sampling
from experiments.engines.sglang import is_partial, read_answer
from experiments.rl.policy import TINY

PROMPT = 3
ENDS = (7,)


def sampling(vocabulary=TINY.vocabulary, tokens=4):
    allowed = np.ones(vocabulary, bool)
    allowed[9] = False
    return Sampling(max_new_tokens=tokens, temperature=1.0, top_p=1.0, ends=ENDS, pad=0, allowed=allowed)


def encode(ids, dtype=np.int32):
    return base64.b64encode(np.asarray(ids, dtype).tobytes()).decode()


def routes(rows):
    """Return the routes of tokens: the experts n and n + 1 of token n."""
    first = np.arange(rows)[:, None] + np.zeros((rows, TINY.layers), int)
    return np.stack([first % 16, (first + 1) % 16], axis=-1)


def good():
    tokens = [5, 6, 7]
    meta = {
        "finish_reason": {"type": "stop", "matched": 7},
        "weight_version": "run-4",
        "prompt_tokens": PROMPT,
        "completion_tokens": 3,
        "output_token_logprobs": [[-0.5, token, None] for token in tokens],
        "routed_experts": encode(routes(PROMPT + len(tokens))),
    }
    return {"output_ids": tokens, "meta_info": meta}


def read(answer, **options):
    return read_answer(answer, PROMPT, sampling(**options), TINY, version="run-4")


def test_an_answer_has_tokens_log_probabilities_and_routes():
    answer = read(good())
    assert answer.tokens.tolist() == [5, 6, 7]
    np.testing.assert_array_equal(answer.log_probs, np.float32([-0.5] * 3))
    np.testing.assert_array_equal(answer.expert_ids, routes(6))
    assert answer.ended
    assert not answer.filled


def test_the_last_token_gets_the_route_of_the_one_before():
    answer = good()
    answer["meta_info"]["routed_experts"] = encode(routes(5))
    read_one = read(answer)
    assert read_one.filled == 1
    np.testing.assert_array_equal(read_one.expert_ids, routes(6)[[0, 1, 2, 3, 4, 4]])


def test_a_partial_answer_counts_only_after_an_interrupt():
    answer = good()
    answer["output_ids"] = [5, 6]
    answer["meta_info"] |= {
        "finish_reason": {"type": "abort", "message": "Aborted"},
        "completion_tokens": 2,
        "output_token_logprobs": [[-0.5, 5, None], [-0.5, 6, None]],
        "routed_experts": encode(routes(4)),
    }
    assert is_partial(answer)
    with pytest.raises(BadAnswer, match="the response ended by 'abort'"):
        read(answer)
    part = read_answer(answer, PROMPT, sampling(), TINY, version="run-4", partial=True)
    assert (part.tokens.tolist(), part.ended, part.filled) == ([5, 6], False, 1)
    # All else of it is checked.
    answer["meta_info"]["output_token_logprobs"].pop()
    with pytest.raises(BadAnswer, match="1 log-probabilities are not those of the 2 tokens"):
        read_answer(answer, PROMPT, sampling(), TINY, version="run-4", partial=True)


def test_a_response_of_the_largest_length_has_not_ended():
    answer = good()
    answer["output_ids"] = [5, 6, 5, 6]
    answer["meta_info"] |= {
        "finish_reason": {"type": "length", "length": 4},
        "output_token_logprobs": [[-1.0, token] for token in (5, 6, 5, 6)],
        "routed_experts": encode(routes(PROMPT + 4)),
        "completion_tokens": 4,
    }
    assert not read(answer).ended


def changed(**fields):
    """Return a good answer with other fields; fields of meta_info too, which None removes."""
    answer = copy.deepcopy(good())
    for name, value in fields.items():
        place = answer if name in answer else answer["meta_info"]
        if value is None:
            del place[name]
        else:
            place[name] = value
    return answer


REPEATED = routes(6)
REPEATED[2, 1] = 3
OUTSIDE = routes(6)
OUTSIDE[4, 0, 1] = 16


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("text", "the answer has another form"),
        ([], "the answer has another form"),
        (changed(output_ids="5"), "tokens must be a list of integers, found 5"),
        (changed(output_ids=[5.0, 6, 7]), r"tokens must be a list of integers, found \[5.0, 6, 7\]"),
        (changed(output_ids=[2**70, 6, 7]), "token -1 may not be sampled"),
        (changed(prompt_tokens=2), "prompt_tokens is 2, where there are 3"),
        (changed(completion_tokens=4), "completion_tokens is 4, where there are 3"),
        (changed(output_token_logprobs=[["-1", 5], [-1, 6], [-1, 7]]), "a log-probability is nan"),
        (changed(output_token_logprobs=[[-(10**400), 5], [-1, 6], [-1, 7]]), "a log-probability is nan"),
        (changed(output_ids=None), "the answer lacks 'output_ids'"),
        (changed(output_token_logprobs=None), "the answer lacks 'output_token_logprobs'"),
        (changed(routed_experts=None), "the answer lacks 'routed_experts'"),
        (changed(routed_experts=""), "no routed_experts: does the server run with"),
        (changed(weight_version="3"), "sampled with weights of version 3, where run-4 were sent"),
        (changed(finish_reason={"type": "abort"}), "the response ended by 'abort'"),
        (changed(finish_reason={"type": "length"}), "finish_reason 'length' after 3 of at most 4 tokens"),
        (changed(output_ids=[], completion_tokens=0), "0 tokens, where 1 to 4 were asked for"),
        (changed(output_ids=[5, 6, 5, 6, 7], completion_tokens=5), "5 tokens, where 1 to 4 were asked for"),
        (changed(output_ids=[5, 9, 7]), "token 9 may not be sampled"),
        (changed(output_ids=[5, 999, 7]), "token 999 may not be sampled"),
        (changed(output_ids=[7, 6, 7]), "an end token is inside the response"),
        (changed(output_token_logprobs=[[-1.0, 5], [-1.0, 6]]), "2 log-probabilities are not those of the 3"),
        (
            changed(output_token_logprobs=[[-1.0, 5], [-1.0, 5], [-1.0, 7]]),
            "3 log-probabilities are not those",
        ),
        (changed(output_token_logprobs=[[float("nan"), 5], [-1, 6], [-1, 7]]), "a log-probability is nan"),
        (changed(output_token_logprobs=[[0.5, 5], [-1, 6], [-1, 7]]), "a log-probability is 0.5"),
        (changed(output_token_logprobs=[[None, 5], [-1, 6], [-1, 7]]), "a log-probability is nan"),
        (changed(routed_experts=encode(routes(4))), "2 of 6 tokens have none"),
        (changed(routed_experts=encode(routes(6)[..., :1])), "expert 0 appears twice"),
        (changed(routed_experts=encode(routes(6)[:, :3])), "ids are not 5 rows"),
        (changed(routed_experts=encode(REPEATED)), "token 2, layer 1"),
        (changed(routed_experts=encode(OUTSIDE)), "token 4, layer 0"),
    ],
)
def test_bad_answers_say_what_is_wrong(answer, message):
    with pytest.raises(BadAnswer, match=message):
        read(answer)


def test_answers_of_sglang_jax_are_read():
    """The answers were captured from sglang-jax at commit cddbf6f1, which served the tiny model with 4 layers."""
    path = Path(__file__).parent / "golden" / "sglang_jax_answer.json"
    for answer, prompt in zip(json.loads(path.read_text()), (5, 3), strict=True):
        options = sampling(vocabulary=394, tokens=8)._replace(allowed=np.ones(394, bool))
        read_one = read_answer(answer, prompt, options, TINY, version=None)
        assert read_one.tokens.tolist() == answer["output_ids"]
        assert read_one.expert_ids.shape == (prompt + 8, 4, 2)
        assert read_one.filled == 1, "an engine does not run the last token"
        raw = np.frombuffer(base64.b64decode(answer["meta_info"]["routed_experts"]), np.int32)
        np.testing.assert_array_equal(read_one.expert_ids[:-1].ravel(), raw)
