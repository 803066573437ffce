"""A model behind OpenAI's HTTP interface: `penstock serve`."""

from penstock.serving.parameters import Target
from penstock.serving.server import bound, is_local, run, url_of
from penstock.serving.service import Service, Settings

__all__ = ["Service", "Settings", "Target", "bound", "is_local", "run", "url_of"]
