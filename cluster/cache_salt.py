"""Cache salts: requests share KV only with requests of the same salt."""


def isolated_salt(tenant: str, cache_salt: str) -> str:
    """Return a cache salt that no two tenants share, whatever salts their requests bring."""
    return f"{len(tenant)} {tenant} {cache_salt}"
