"""The engine as a separate process: `python -m headway.engine_process.main`, started by the front end."""
