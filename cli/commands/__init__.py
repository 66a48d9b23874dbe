"""The commands of `thresher`: a class each, in a file a group. docs/add/command.md says how one is added."""
