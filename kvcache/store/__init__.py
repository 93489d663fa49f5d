"""The shared store: blocks as objects in a folder or a bucket that all workers of a model read and write.

    loop thread      BlockStore.put ──▶ rows ──▶ threads ──▶ Objects.write     folder: kvcache/store/folder.py
                     BlockStore.find, fetch ───▶ threads ──▶ Objects.read      bucket: kvcache/store/bucket.py
                     events ◀── done

Invariants:

1. An object is named by its block's key under its model's fingerprint, so two versions of a model share nothing, and
   every writer of a name writes the same block.
2. No object is trusted. `reading.py` refuses what is torn, truncated, foreign or forged; the loan then compares
   the fingerprint of the bytes in the pool, as with any lender.
3. Nothing waits for the store on the engine's loop. A block for which no row is available is dropped and counted.
4. No lock is shared by writers. An object appears whole, by a rename or by one upload; any writer may remove any object
   at any time, and a reader takes a missing object for a miss.
"""
