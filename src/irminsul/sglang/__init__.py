"""The SGLang plugin: shifted reuse inside the distributed engine, for SGLang 0.5.23.

SGLang's own tree stays the owner of every row. The plugin adds, around it:

* `cache`: the tree with two more habits: it tells the registry which rows came and went, and it keeps derived rows
  below exact ones, where only their own session's next turn finds them;
* `admission`: a plan for each request that is about to run, its donors locked, its budget charged for computed tokens;
* `forward`: copies the reused rows, then runs all gaps of a request as rows of one batch, in one forward;
* `support`: what has been shown to work and what is refused, as one table for the code, `doctor` and the docs.

Only `plugin`, `cache`, `admission`, `forward` and `live_model` import SGLang, and only when a server starts.
"""
