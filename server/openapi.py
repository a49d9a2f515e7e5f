"""The application, and what /openapi.json says of it: the truth about names that no field has."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI


class Application(FastAPI):
    """A FastAPI application whose description says whether a body may hold names that no field has."""

    allows_unknown_fields = False

    def openapi(self) -> dict[str, Any]:
        """The description, made once."""
        if self.openapi_schema is None:
            schemas = super().openapi().get("components", {}).get("schemas", {})
            for schema in schemas.values():
                # Bodies keep unknown names, so that they can be refused by name.
                if schema.get("additionalProperties") is True and not self.allows_unknown_fields:
                    schema["additionalProperties"] = False
        assert self.openapi_schema is not None
        return self.openapi_schema
