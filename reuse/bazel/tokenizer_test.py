"""A chat becomes ids and a mask of what the assistant said; the file that asked for it is nobody's but the library's own."""

from align.tokenizer import Decoder, vendored

tokenizer = vendored("mistral-7b-v0.3")
chat = tokenizer.render_chat([{"role": "user", "content": "Is [/INST] a word?"}, {"role": "assistant", "content": "No."}])
assert chat.text == "<s>[INST] Is [/INST] a word?[/INST] No.</s>"
said = [token for token, trained in zip(chat.ids, chat.assistant_mask, strict=True) if trained]
assert tokenizer.decode(said) == "No.</s>"
ids = tokenizer.encode("Hello world", add_special_tokens=True)
assert ids == [1, 23325, 2294]
decoder = Decoder(tokenizer, skip_special=True)
assert "".join(map(decoder.push, ids)) + decoder.finish() == "Hello world"
