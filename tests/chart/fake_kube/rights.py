"""Who may do what: tokens, and the Roles and RoleBindings that were applied.

A namespaced Role gives what its rules say and nothing else. `create` and `list` name no object, so a rule with
`resourceNames` does not give them; a list or watch with a field selector for one name is not made an exception of here.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.chart.fake_kube.kinds import Object, Place
from tests.chart.fake_kube.refusal import Refused
from tests.chart.fake_kube.store import Store

ADMIN = "system:admin"


@dataclass(frozen=True, slots=True)
class Ask:
    """One request, as RBAC sees it."""

    user: str
    verb: str
    group: str
    resource: str
    """With its subresource: deployments/scale."""
    namespace: str | None
    name: str | None


def account(namespace: str, name: str) -> str:
    """The user that a service account is."""
    return f"system:serviceaccount:{namespace}:{name}"


def check(store: Store, user: str, verb: str, place: Place) -> None:
    """Raises Refused (403)."""
    ask = Ask(user, verb, place.kind.group, place.resource, place.namespace, place.name)
    if user != ADMIN and not any(_gives(rule, ask) for rule in _rules(store, ask)):
        of = f' "{place.name}"' if place.name else ""
        raise Refused(
            403,
            "Forbidden",
            f'{place.kind.qualified}{of} is forbidden: User "{user}" cannot {verb} resource "{place.resource}" in API '
            f'group "{place.kind.group}" in the namespace "{place.namespace}"',
            name=place.name or "",
            kind=place.kind.plural,
        )


def _rules(store: Store, ask: Ask) -> list[Object]:
    """Of every Role that the user is bound to in that namespace."""
    if ask.namespace is None:
        return []
    roles = [
        store.find("Role", binding["roleRef"]["name"], ask.namespace)
        for binding in store.all("RoleBinding", ask.namespace)
        if any(_is(subject, ask.user) for subject in binding.get("subjects") or ())
    ]
    return [rule for role in roles if role is not None for rule in role.get("rules") or ()]


def _is(subject: Object, user: str) -> bool:
    if subject["kind"] == "ServiceAccount":
        return account(subject["namespace"], subject["name"]) == user
    return bool(subject["kind"] == "User" and subject["name"] == user)


def _gives(rule: Object, ask: Ask) -> bool:
    names = rule.get("resourceNames") or ()
    return (
        ask.group in rule["apiGroups"]
        and ask.resource in rule["resources"]
        and ask.verb in rule["verbs"]
        and (not names or ask.name in names)
    )
