"""The global router: takes requests, places each on a pair of workers, retries what fails."""
