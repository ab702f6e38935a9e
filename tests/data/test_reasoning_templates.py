"""Templates of reasoning models: variables of the template, <think> opened in the prompt, several end-of-turn ids; and that engine,
graders and learner know one set of end ids. The templates are shortened ones in the manner of the models they are named after."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from akl_dist.config.schema import DataConfig
from akl_dist.contract.errors import ModelError
from akl_dist.data import template as template_module
from akl_dist.data.source import load
from akl_dist.data.template import PromptTemplate
from akl_dist.rollout.sampling import end_ids
from akl_dist.verify import segments

PACKAGE = Path(template_module.__file__).resolve().parents[1]

QWEN3 = """{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""
R1 = """{{- bos_token }}
{%- for m in messages %}
    {%- if m.role == 'system' %}{{- m.content }}{%- endif %}
    {%- if m.role == 'user' %}{{- '<|User|>' + m.content }}{%- endif %}
    {%- if m.role == 'assistant' %}{{- '<|Assistant|>' + m.content.split('</think>')[-1] + '<|end_of_sentence|>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|Assistant|><think>\\n' }}{%- endif %}"""
LLAMA3 = """{{- bos_token }}
{%- for m in messages %}
    {{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""
GEMMA = """{{- bos_token }}
{%- if messages[0].role == 'system' %}{{- raise_exception('System role not supported') }}{%- endif %}
{%- for m in messages %}
    {{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' + m.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}"""

# template, special tokens (ids from 256 on, in this order), bos, eos, eos_token_id of the generation config
FAMILIES = {
    "qwen3": (QWEN3, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], None, "<|im_end|>", [258, 256]),
    "r1": (R1, ["<|begin_of_sentence|>", "<|end_of_sentence|>", "<|User|>", "<|Assistant|>"], "<|begin_of_sentence|>",
           "<|end_of_sentence|>", 257),
    "llama3": (LLAMA3, ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
                        "<|eom_id|>"], "<|begin_of_text|>", "<|eot_id|>", [257, 261, 260]),
    "gemma": (GEMMA, ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"], "<bos>", "<eos>", 257),
}
END_TOKENS = {
    "qwen3": {"<|endoftext|>", "<|im_end|>"}, "r1": {"<|end_of_sentence|>"},
    "llama3": {"<|end_of_text|>", "<|eot_id|>", "<|eom_id|>"}, "gemma": {"<eos>", "<end_of_turn>"},
}


def model_folder(folder: Path, family: str) -> Path:
    """A byte-level tokenizer without merges (256 bytes, then the family's special tokens), its template and generation config."""
    text, special, bos, eos, generation = FAMILIES[family]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({character: index for index, character in enumerate(alphabet)}, []))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    core.add_special_tokens([AddedToken(one, special=True) for one in special])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token=bos, eos_token=eos)
    tokenizer.chat_template = text
    tokenizer.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}), encoding="utf-8")
    return folder


@pytest.fixture(params=FAMILIES)
def family(request) -> str:
    return request.param


def rendered(folder: Path, **options) -> tuple[str, bool]:
    template = PromptTemplate(folder, **options)
    found = template.render("2+2?")
    return template.tokenizer.decode(list(found.token_ids)), found.think_open


# --- what a response begins with -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "variables", "tail", "think_open"), [
    ("qwen3", {}, "<|im_start|>assistant\n", False),
    ("qwen3", {"enable_thinking": True}, "<|im_start|>assistant\n", False),
    ("qwen3", {"enable_thinking": False}, "<|im_start|>assistant\n<think>\n\n</think>\n\n", False),  # closed again: not open
    ("r1", {}, "<|Assistant|><think>\n", True),
    ("llama3", {}, "<|end_header_id|>\n\n", False),
    ("gemma", {}, "<start_of_turn>model\n", False),
])
def test_what_a_response_begins_with(tmp_path, name, variables, tail, think_open):
    text, opened = rendered(model_folder(tmp_path, name), variables=variables)
    assert text.endswith(tail) and opened is think_open
    assert text.count("2+2?") == 1


def test_think_is_open_only_at_the_very_end(tmp_path):
    """A <think> that the problem itself speaks of is no opened section of the prompt."""
    found = PromptTemplate(model_folder(tmp_path, "qwen3"), suffix=" Reason inside <think>").render("2+2?")
    assert not found.think_open


def test_one_spelling_of_the_think_tag():
    assert template_module.THINK == segments.THINK


def test_variables_reach_every_prompt_and_unknown_ones_are_noted(tmp_path, write_jsonl):
    folder = model_folder(tmp_path / "model", "qwen3")
    path = write_jsonl("rows.jsonl", [{"prompt": "2+2?", "answer": "4"}])
    def loaded(variables):
        data = DataConfig(recipe="generic", path=path, eval_path=path, max_prompt_tokens=200, template_kwargs=variables)
        return load(data, folder, num_eval_problems=None)

    closed = loaded({"enable_thinking": False})
    assert closed.train[0].token_ids == closed.evaluation[0].token_ids != loaded({}).train[0].token_ids
    assert closed.report.notes == ()
    typo = loaded({"enable_thinkin": False, "enable_thinking": False})
    assert typo.train[0].token_ids == closed.train[0].token_ids
    assert "data.template_kwargs.enable_thinkin: the chat template" in typo.report.notes[0]
    assert len(typo.report.notes) == 1 and "note: data.template_kwargs.enable_thinkin" in str(typo.report)


def test_prompts_carry_think_open(tmp_path, write_jsonl):
    path = write_jsonl("rows.jsonl", [{"prompt": "2+2?", "answer": "4"}])
    for name in ("r1", "qwen3"):
        data = DataConfig(recipe="generic", path=path, max_prompt_tokens=200)
        prompt = load(data, model_folder(tmp_path / name, name), num_eval_problems=0).train[0]
        assert prompt.think_open is (name == "r1")


def test_a_system_message_that_the_template_refuses(tmp_path):
    with pytest.raises(ModelError, match=r"System role not supported.*data\.system_prompt=null"):
        PromptTemplate(model_folder(tmp_path, "gemma"), system_prompt="be brief").encode("2+2?")


@pytest.mark.parametrize("variables", [{"tools": [1]}, {"date": 5}])
def test_variables_of_another_kind_than_the_template_takes(tmp_path, variables):
    """transformers and the template's own arithmetic raise what they like; the message is ours."""
    folder = model_folder(tmp_path, "qwen3")
    (folder / "chat_template.jinja").write_text("{{- 'Today: ' + (date if date is defined else 'never') }}\n" + QWEN3)
    assert PromptTemplate(folder, variables={"date": "1 May"}).encode("2+2?")
    with pytest.raises(ModelError, match=rf"chat template.*data\.template_kwargs \({next(iter(variables))}\)"):
        PromptTemplate(folder, variables=variables).encode("2+2?")


# --- what ends a response -------------------------------------------------------------------------------------------------


def test_end_ids_of_each_family(tmp_path, family):
    folder = model_folder(tmp_path, family)
    vocabulary = PromptTemplate(folder).tokenizer.get_vocab()
    assert end_ids(folder) == tuple(sorted(vocabulary[token] for token in END_TOKENS[family]))


def test_no_prompt_ends_with_an_end_id(tmp_path, family):
    """A response must not be over before it has begun, and what closes the user's turn is among the end ids where the template
    uses one token for every turn."""
    folder = model_folder(tmp_path, family)
    ids = PromptTemplate(folder).encode("2+2?")
    assert ids[-1] not in end_ids(folder)
    assert (set(ids) & set(end_ids(folder)) == set()) is (family == "r1")


# --- one function for all stages ------------------------------------------------------------------------------------------

READS_END_TOKENS = {
    "rollout/sampling",  # the one function
    "rollout/observations",  # finds where the template ends a turn, to know what it writes behind it
    "tiny/make_model", "tiny/tokenizer",  # make a model folder, which is where end_ids reads them
    "data/template", "config/validate_data",  # name the variables that the tokenizer gives the template
}
END_NAMES = ("eos_token", "eos_token_id", "eos_id", "EOS", "EOS_ID", "eot_id")


def end_token_names(source: str) -> set[str]:
    """Names and attributes by which a module could learn of end tokens in another way than from end_ids."""
    tree = ast.walk(ast.parse(source))
    return {name for node in tree for name in END_NAMES if name in (
        getattr(node, "attr", None), getattr(node, "id", None), getattr(node, "arg", None),
        node.value if isinstance(node, ast.Constant) else None)}


def module_name(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").as_posix()


def test_nothing_else_reads_end_tokens():
    found = {module_name(path) for path in PACKAGE.rglob("*.py") if end_token_names(path.read_text(encoding="utf-8"))}
    assert found <= READS_END_TOKENS


@pytest.mark.parametrize("source", ["stop = tokenizer.eos_token_id", "f(eos_token_id=2)", "config['eos_token_id']", "x = EOS_ID"])
def test_the_rule_can_fail(source):
    assert end_token_names(source)


def calls_without_end_ids(source: str) -> list[str]:
    """Calls that make a Sampling or a VerifySettings and give it end ids from anywhere but end_ids() or a name that holds it."""
    tree = ast.parse(source)
    known = {ast.unparse(target) for node in ast.walk(tree) if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
             and ast.unparse(node.value.func) == "end_ids" for target in node.targets}
    out = []
    for node in ast.walk(tree):
        name = ast.unparse(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""
        if isinstance(node, ast.Call) and name in ("Sampling", "VerifySettings"):
            given = {word.arg: ast.unparse(word.value) for word in node.keywords}
            ends = given.get("end_ids") or (ast.unparse(node.args[1]) if name == "VerifySettings" and len(node.args) > 1 else None)
            if ends not in known | {"run.end_ids"}:  # the loop's run is made with the assembly's
                out.append(ast.unparse(node))
    return out


@pytest.mark.parametrize("name", ["assembly", "evaluate", "loop"])
def test_engines_and_graders_are_given_the_one_set(name):
    source = (PACKAGE / f"{name}.py").read_text(encoding="utf-8")
    assert calls_without_end_ids(source) == []
    assert "Sampling(" in source


def test_the_one_set_can_be_missed():
    assert calls_without_end_ids("Sampling(group_size=1, end_ids=(2,))")
    assert calls_without_end_ids("ends = end_ids(m)\nVerifySettings(m, other, c)")
    assert not calls_without_end_ids("ends = end_ids(m)\nVerifySettings(m, ends, c)\nSampling(end_ids=ends)")
