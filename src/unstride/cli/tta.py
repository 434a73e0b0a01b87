"""`unstride tta list POLICY`: the views that a budget takes."""

from typing import Annotated

import typer

from unstride.cli.options import MOST, AsJson
from unstride.storage import strict_json


def register(app: typer.Typer) -> None:
    group = typer.Typer(help="Test-time augmentation policies.", no_args_is_help=True)

    @group.callback()
    def tta() -> None:  # without it typer takes a group of one command for the command itself
        """Test-time augmentation policies."""

    @group.command("list")
    def list_views(
        policy: Annotated[str, typer.Argument(help="standard, expanded, segmentation, or a .toml or .json file.")],
        budget: Annotated[int | None, typer.Option(min=1, max=MOST, help="How many views; all by default.")] = None,
        as_json: AsJson = False,
    ) -> None:
        """List the views of a policy in the order that a budget takes them, with their intensity."""
        from unstride.recipe import policies

        chosen = policies.get(policy)
        views = chosen.views if budget is None else chosen.first(budget)
        if as_json:
            rows = [{"view": str(v), "intensity": v.intensity} for v in views]
            typer.echo(
                strict_json.dumps({"policy": chosen.name, "seed": chosen.seed, "size": len(chosen), "views": rows})
            )
            return
        typer.echo(f"{chosen.name}: {len(views)} of {len(chosen)} views")
        for k, view in enumerate(views, 1):
            typer.echo(f"{k:5d}  {view.intensity:.3f}  {view}")

    app.add_typer(group, name="tta")
