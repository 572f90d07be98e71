"""Between text and token ids: tokenizer and chat template on the way in, detokenizer and stop strings on the way out.

Everything here runs on the host, knows no tensors, and works on one request at a time. Text is exact: what is
streamed in pieces joins to what a decode of the whole would give, no character is ever cut, and user content is data.

Before: server/ and engine/ (messages come in).  After: request.py (ids go on), engine/streams.py (text goes out).
"""
