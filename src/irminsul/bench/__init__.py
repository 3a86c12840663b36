"""Load on running servers: ``irminsul bench serve`` replays sessions over HTTP, ``irminsul bench report`` shows them.

* `load`: which prompts are sent, from request logs or patterns;
* `pace`: when each of them is sent;
* `server`: what a server says of itself, and how its cache is emptied;
* `client`: sends one request and measures its stream;
* `summary`: many measured requests in a few numbers;
* `run`: blocks, in turn over the servers; `results`: the file they are kept in; `report`: tables and a page.

docs/bench.md says what is measured and how.
"""
