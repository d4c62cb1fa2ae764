"""Tools in the form of TRL's documentation: functions, async ones, and methods of an object."""

import asyncio


def multiply(a: int, b: int) -> int:
    """
    Multiplies two integers.

    Args:
        a: The first integer.
        b: The second integer.

    Returns:
        The product of the two integers.
    """
    return a * b


async def async_add(a: int, b: int) -> int:
    """
    Asynchronously adds two integers.

    Args:
        a: The first integer.
        b: The second integer.

    Returns:
        The sum of the two integers.
    """
    await asyncio.sleep(0)
    return a + b


class Database:
    """A shop's stock."""

    def __init__(self, stock: dict[str, int]):
        self.stock = stock

    def count(self, item: str, colours: list[str] | None = None) -> dict:
        """
        Counts what is in stock.

        Args:
            item: The name of the item.
            colours: Colours to count. Without them all are counted.
        """
        if item not in self.stock:
            raise KeyError(item)
        return {"item": item, "count": self.stock[item], "colours": colours or "all"}


count = Database({"chair": 3}).count
