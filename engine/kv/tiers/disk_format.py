"""Format of a disk tier's file.

    superblock │ group │ group │ ...          each group: header area │ payload │ payload │ ...

A group has as many slots as headers fit into its header area. So all headers of a file take few large reads, and a
slot's place does not depend on the number of slots: a file is shrunk by truncating it. Header areas and payloads begin
on pages, so no page belongs to two payloads. Integers are little-endian.

An all-zero header means an empty slot. Every other header has a checksum over its slot's number and its contents; a
header that does not match is torn, and the slot is refused.
"""

from dataclasses import dataclass
from hashlib import blake2b
from struct import Struct

from engine.block_keys import KEY_BYTES
from engine.kv.tiers.slots import NamedBlock

PAGE_BYTES = 4096
SUPERBLOCK_BYTES = PAGE_BYTES
MAGIC = b"TNDMTIER"
VERSION = 1
CHECKSUM_BYTES = 8
_SUPERBLOCK = Struct("<8sIIQQ32s")  # magic, version, kv_heads, block_bytes, slots, hash of the model fingerprint
_HEADER = Struct(f"<{KEY_BYTES}s{KEY_BYTES}sQ")  # parent, key, generation; the fingerprint and checksum follow


@dataclass(frozen=True, slots=True)
class SlotHeader:
    """A block and the generation of its write: of two headers, the greater generation is newer."""

    block: NamedBlock
    generation: int


@dataclass(frozen=True, slots=True)
class DiskFormat:
    """Offsets and encodings of a file of blocks of `block_bytes` with `kv_heads` fingerprints each."""

    block_bytes: int
    kv_heads: int

    @property
    def header_bytes(self) -> int:
        return _HEADER.size + 8 * self.kv_heads + CHECKSUM_BYTES

    @property
    def area_bytes(self) -> int:
        """Bytes of a group's header area."""
        return _whole_pages(self.header_bytes)

    @property
    def slots_per_group(self) -> int:
        return self.area_bytes // self.header_bytes

    @property
    def payload_stride(self) -> int:
        return _whole_pages(self.block_bytes)

    @property
    def group_bytes(self) -> int:
        return self.area_bytes + self.slots_per_group * self.payload_stride

    def slots_within(self, num_bytes: int) -> int:
        """Return the number of slots of a file of at most `num_bytes`."""
        groups, rest = divmod(max(0, num_bytes - SUPERBLOCK_BYTES), self.group_bytes)
        return groups * self.slots_per_group + max(0, rest - self.area_bytes) // self.payload_stride

    def area_offset(self, group: int) -> int:
        return SUPERBLOCK_BYTES + group * self.group_bytes

    def header_offset(self, slot: int) -> int:
        group, index = divmod(slot, self.slots_per_group)
        return self.area_offset(group) + index * self.header_bytes

    def payload_offset(self, slot: int) -> int:
        group, index = divmod(slot, self.slots_per_group)
        return self.area_offset(group) + self.area_bytes + index * self.payload_stride

    def pack_superblock(self, num_slots: int, model_fingerprint: bytes) -> bytes:
        """Return the superblock, one page."""
        model = blake2b(model_fingerprint, digest_size=32).digest()
        fields = _SUPERBLOCK.pack(MAGIC, VERSION, self.kv_heads, self.block_bytes, num_slots, model)
        return (fields + _checksum(fields)).ljust(SUPERBLOCK_BYTES, b"\0")

    def superblock_fault(self, page: bytes, model_fingerprint: bytes) -> str:
        """Return why the slots behind this superblock cannot be used here; empty when they can."""
        fields = page[: _SUPERBLOCK.size]
        if len(page) < SUPERBLOCK_BYTES or _checksum(fields) != page[_SUPERBLOCK.size :][:CHECKSUM_BYTES]:
            return "its superblock is damaged"
        _, _, _, _, num_slots, _ = _SUPERBLOCK.unpack(fields)
        if page != self.pack_superblock(num_slots, model_fingerprint):
            return "it was written for another version, model or KV layout"
        return ""

    def pack_header(self, slot: int, header: SlotHeader) -> bytes:
        block = header.block
        assert len(block.parent) == len(block.key) == KEY_BYTES
        fields = _HEADER.pack(block.parent, block.key, header.generation) + block.fingerprint
        return fields + _checksum(slot.to_bytes(8, "little") + fields)

    def unpack_header(self, slot: int, packed: bytes) -> SlotHeader | None:
        """Return the header, or None when it is torn."""
        fields, checksum = packed[:-CHECKSUM_BYTES], packed[-CHECKSUM_BYTES:]
        if len(packed) != self.header_bytes or checksum != _checksum(slot.to_bytes(8, "little") + fields):
            return None
        parent, key, generation = _HEADER.unpack_from(fields)
        return SlotHeader(NamedBlock(parent, key, fields[_HEADER.size :]), generation)


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def _checksum(fields: bytes) -> bytes:
    return blake2b(fields, digest_size=CHECKSUM_BYTES).digest()
