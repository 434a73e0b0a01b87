from unstride.cli import app

app()
