"""The long prompt of the demo: about a thousand tokens of plain prose, written for it."""

from __future__ import annotations

LONG_PROMPT = """\
The town of Harrow Point stood where the river met the sea, and for as long as anyone could remember it had lived by \
two kinds of work. In the upper town, along the hill, stood the mills. They took in grain by the wagon, great loads of \
it at a time, and for as long as a load was being ground nobody could hear himself speak. In the lower town, down by \
the harbour, were the bakeries. A baker needs only a little flour at a time, but he needs it always: a scoop for this \
dough, a scoop for the next, from the hour before dawn until the evening boats came in.

In the old days mill and bakery had been under one roof. It seemed the natural way. The grain came in at one door, the \
bread went out at the other, and the flour never had to travel further than the length of a room. But whenever a big \
wagon arrived, the whole house turned to it. The men left their ovens to carry sacks, the floor shook, the air filled \
with dust, and the loaves that were half done had to wait. The people who stood in the street with their baskets did \
not care how much grain was being ground behind the wall. They only knew that the bread, which had been coming at a \
steady pace, had stopped, and that nobody could tell them when it would come again.

It was the widow Anselm who changed it. She had kept the accounts of the largest house for twenty years, and she had \
noticed something that the millers and the bakers, each busy with his own work, had never put together. On the days \
when no wagon came, the bakers were never late. On the days when many wagons came, they were always late, and yet the \
millers on those days complained as loudly as anyone, because every time they had set the stones to the right pace, \
someone called them away to help with the ovens. Each trade, she wrote in her book, is the other's bad weather.

So she proposed that they part. The mills should go up the hill, where the wind was strong and the wagons could turn, \
and the bakeries should stay by the water, where the people were. At the council that evening there was a great deal \
of shaking of heads. How, they asked her, would the flour get down the hill? A house with one roof has no need of \
carts. A cart can break a wheel. A cart can be late, it can be robbed, and worst of all, it can bring the wrong sack, \
and no one will know until the bread has been eaten.

The widow had expected the question, and she answered it point by point. A miller, she said, will not send a cart \
until the baker has told him that there is an empty bin for the flour, and which bin it is. Every sack will be sealed, \
and the number on the seal will go down the hill by a different messenger. At the bottom the sack will not be tipped \
into the bin at once. It will be set down in a shed by the gate, and there the baker will look at the seal and compare \
the number, and only when the two agree will he carry the flour inside with his own hands. If they do not agree, he \
sends for another sack. If no sack comes, he has a small hand mill in the corner, and he can grind that much himself. \
He will be slower that day, but he will never bake with flour that he does not know.

And the first loaf, somebody asked from the back of the room, the first loaf of the day, must the people wait for it \
until the cart has gone all the way down the hill? No, said the widow, and it was said afterwards that this was the \
moment when the council came over to her side. The miller has flour in his hands before anyone else. Let him bake the \
first loaf himself, up there, and let a boy run down with it. By the time it has been eaten, the cart will have come.

They tried it for a month, and then for a year. The mills on the hill ground whole wagons without a pause, and the \
millers found that with nobody calling them away they could do in a morning what had used to take them a day. The \
bakers by the harbour worked at their steady pace, one loaf after another, and the people with the baskets learned to \
tell the hour by it. When the harvest was large, the town built another mill, and when the summer visitors came, it \
opened another bakery, and neither had to ask the other for leave. Once, in a storm, the wall of the upper road fell \
and no cart could pass for two days. The hand mills were brought out, the bread was late, and it was as good as ever.

Many years later a traveller who had heard of the place came to see it for himself. He walked from the mills to the \
harbour and back again, he counted the carts and read the numbers on the seals, and in the evening he sat down on the \
sea wall beside an old woman and asked her what, in her opinion, had been the secret of it all. She thought about the \
question for a while, and looked out at the boats, and then she said:"""
