def write_report(run, out):
    return "todo"
