"""Shows and sets the bucket's lifecycle rule for kvstore's prefix: the eviction that costs no requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvstore_s3.access import Access
from kvstore_s3.boto_path import ask
from kvstore_s3.errors import S3Error
from kvstore_s3.options import S3Options, wrong

_MAX_DAYS: Final = 36_500
_DAY_S: Final = 86_400.0


@dataclass(frozen=True, slots=True)
class LifecycleRule:
    """One rule that expires objects by age.

    Attributes:
        name: Its id in the bucket.
        prefix: Start of the keys that it is about; empty for the whole bucket.
        days: Age in days at which objects expire; 0 when the rule expires nothing by age.
        enabled: Whether it is in force.
    """

    name: str
    prefix: str
    days: int
    enabled: bool

    def covers(self, options: S3Options) -> bool:
        """Whether the rule expires objects of this tier."""
        return self.enabled and self.days > 0 and folder(options).startswith(self.prefix)


def folder(options: S3Options) -> str:
    """Start of all keys of a tier."""
    return f"{options.prefix}/" if options.prefix else ""


def lifecycle_rules(access: Access, options: S3Options) -> list[LifecycleRule]:
    """Return the bucket's rules; an empty list when it has none.

    Raises:
        S3Error: The bucket cannot be asked; code ``NotImplemented`` where the server knows no rules.
    """
    return [_parse(rule) for rule in _rules(access, options)]


def set_lifecycle(access: Access, options: S3Options, days: int) -> None:
    """Expire this tier's objects ``days`` after their creation or last refresh; other rules stay.

    Args:
        access: The account.
        options: Bucket and prefix.
        days: 1 to 36,500; 0 removes the rule.

    Raises:
        ConfigError: ``days`` is out of range.
        S3Error: The bucket refuses.
    """
    if not 0 <= days <= _MAX_DAYS:
        raise wrong("days", days, f"0 (no rule) to {_MAX_DAYS}")
    rules = [rule for rule in _rules(access, options) if rule.get("ID") != _name(options)]
    if days:
        rules.append(
            {
                "ID": _name(options),
                "Filter": {"Prefix": folder(options)},
                "Status": "Enabled",
                "Expiration": {"Days": days},
            }
        )
    bucket = options.bucket
    if rules:
        wanted = {"Rules": rules}
        ask(access, lambda s3: s3.put_bucket_lifecycle_configuration(Bucket=bucket, LifecycleConfiguration=wanted))
    else:
        ask(access, lambda s3: s3.delete_bucket_lifecycle(Bucket=bucket))


def refresh_advice(options: S3Options, rules: Sequence[LifecycleRule]) -> str:
    """Say what to do when used objects would expire with the unused ones; empty when they would not.

    A lifecycle counts from creation, so the first blocks of every prefix, which are written once and
    read for ever, would go before their continuations.
    """
    days = min((rule.days for rule in rules if rule.covers(options)), default=0)
    if not days or 0 < (options.refresh_after or 0.0) <= days * _DAY_S / 2:
        return ""
    return f'set refresh_after = "{days * 12}h" (half of the {days} days), so that objects in use stay'


def _rules(access: Access, options: S3Options) -> list[dict[str, Any]]:
    try:
        answer = ask(access, lambda s3: s3.get_bucket_lifecycle_configuration(Bucket=options.bucket))
    except S3Error as e:
        if e.code == "NoSuchLifecycleConfiguration":
            return []
        raise
    rules: list[dict[str, Any]] = answer.get("Rules", [])
    return rules


def _parse(rule: dict[str, Any]) -> LifecycleRule:
    scope = rule.get("Filter", {})
    prefix = scope.get("Prefix", scope.get("And", {}).get("Prefix", rule.get("Prefix", "")))
    days = int(rule.get("Expiration", {}).get("Days", 0))
    return LifecycleRule(str(rule.get("ID", "")), str(prefix), days, rule.get("Status") == "Enabled")


def _name(options: S3Options) -> str:
    return f"kvstore {folder(options) or 'whole bucket'}"
