"""What an output means, how it is combined, and how confident it is: one place that everything else asks."""

from unstride.tasks.tasks import COMBINES, TASKS, Task, task_named

__all__ = ["COMBINES", "TASKS", "Task", "task_named"]
