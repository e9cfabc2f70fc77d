"""The engine as a process of its own: `python -m headway.engine_process.main`, started by the front end."""
