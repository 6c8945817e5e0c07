"""Writes a model folder with random weights and a trained tokenizer: tiny_model.py FOLDER. Needs `tokenizers`."""

import json
import os
import sys

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

folder = sys.argv[1]
os.makedirs(folder, exist_ok=True)

# What it is trained on matters little; Python's own sources are on every machine that gets here.
library = os.path.dirname(os.__file__)
sources = [os.path.join(library, name) for name in sorted(os.listdir(library)) if name.endswith(".py")][:120]
alphabet = pre_tokenizers.ByteLevel.alphabet()
words = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
trainer = trainers.BpeTrainer(vocab_size=4096, special_tokens=words, initial_alphabet=alphabet)
tokenizer.train(sources, trainer)
tokenizer.save(os.path.join(folder, "tokenizer.json"))

template = (
    "{%- for message in messages -%}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor -%}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant\n{% endif -%}"
)
size = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, head_dim=32)
ends = dict(bos_token_id=1, eos_token_id=2)
contents = {
    "config.json": dict(
        architectures=["LlamaForCausalLM"], model_type="llama", vocab_size=4096, max_position_embeddings=8192,
        hidden_act="silu", rms_norm_eps=1e-5, rope_theta=1e4, tie_word_embeddings=False, torch_dtype="float32",
        pad_token_id=2, **size, **ends),
    "generation_config.json": ends,
    "tokenizer_config.json": dict(
        tokenizer_class="PreTrainedTokenizerFast", model_max_length=8192, clean_up_tokenization_spaces=False,
        bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="</s>", chat_template=template),
}
for name, content in contents.items():
    with open(os.path.join(folder, name), "w") as file:
        json.dump(content, file, indent=1)
