"""Programs that ask models over HTTP, as they are: each is an environment whose turns are its calls.

In: a program (a function or a command line), tasks, who sits behind which model's name. Out: a PettingZoo environment.
Waits for: the program's next call, with a deadline. Start at `program`, the environment; `gateway` is the server that
programs talk to, `protocols` how they ask, `calls` what is asked and answered, `running` starts and ends them. `traces`
reads calls that were recorded elsewhere, as `spans` finds them in what exporters write.
"""
